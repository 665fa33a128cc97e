"""The rotation and quantization of queries before attention."""
