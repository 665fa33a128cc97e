"""What commands inside engines share: a small model of random weights, and logprobs compared."""
