"""Speech and sound to tokens and back: a log-mel residual-quantiser codec with a feed-forward vocoder."""
