"""The experiments of CPS, and how their results are drawn and tabled."""
