"""24 · Who is preempted, beside how."""
