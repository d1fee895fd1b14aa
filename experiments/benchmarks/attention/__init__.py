"""Times attention: named cases × backends × direction, interleaved in one process."""
