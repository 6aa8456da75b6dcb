"""The ops on a GPU. Each file here is the twin of the torch file of its name one floor up."""
