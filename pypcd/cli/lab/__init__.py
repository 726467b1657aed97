"""The commands of `pypcd lab`: the paper's measurements, a module each."""
