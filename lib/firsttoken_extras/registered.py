"""The extensions that the extras add to the library, by name: each is imported when it is asked for
(``study.extensions``)."""

PART_FORMATS = {"planes": "firsttoken_extras.bitplanes.plane_format:PlaneFormat"}
REBALANCING = {"fewest-moves": "firsttoken_extras.min_move_rebalancing.rule:MinMoveRebalancing"}
