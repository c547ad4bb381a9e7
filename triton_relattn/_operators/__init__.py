"""Registration with torch: operators and their derivatives, FLOP formulas, sharding strategies."""
