"""Many cold starts at once, over one shared link."""
