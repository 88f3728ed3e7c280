"""Who answers for what: commitments, audits, a judge, accounts of points, and a queue that spends them."""
