"""A replica that is still loading borrows from a warm neighbour the layers that have not come."""
