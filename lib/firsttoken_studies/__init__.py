"""How each number of the reports is measured, summarised and drawn: one folder a report, on the library beside it."""
