"""The contract between a trainer and its generators: the schema, its codec, the tokenizer's fingerprint."""
