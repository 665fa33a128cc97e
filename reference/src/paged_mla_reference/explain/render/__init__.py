"""An explanation for readers: text, one HTML page, pictures, and a comparison with taps."""
