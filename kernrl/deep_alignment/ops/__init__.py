"""The ops themselves, one family a file, in pure torch: this is the contract and the CPU path."""
