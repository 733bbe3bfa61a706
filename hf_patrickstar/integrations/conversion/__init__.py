"""Configurations of DeepSpeed, FSDP and Accelerate, key by key: what each becomes here, or why it is gone."""
