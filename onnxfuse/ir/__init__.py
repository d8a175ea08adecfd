"""The fusion: named axes, parts, operands, a straight line of steps."""
