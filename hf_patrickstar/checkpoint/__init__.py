"""Between the model's weights as everybody knows them and chunks."""
