"""Ideas of this project that no report asks for, each in a folder that explains itself."""
