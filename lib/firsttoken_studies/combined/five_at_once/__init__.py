"""All five reports in one replica that starts cold under load, against each alone and all but each."""
