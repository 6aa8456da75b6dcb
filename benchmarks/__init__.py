"""kernrl beside its peers, on the machine that runs this."""
