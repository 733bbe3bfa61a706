"""WHERE each element lives: specs, packing into chunks, chunk-size search, embeddings. Allocates nothing."""
