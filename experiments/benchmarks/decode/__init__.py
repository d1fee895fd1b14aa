"""Times decoding: parallel sequences × prompt length × form of the cache."""
