"""What sender and receiver are asked: a long prefix that both read, a short suffix that opens the answer, a score."""
