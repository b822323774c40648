"""What cache policies lose, hold and read on long texts, beside what keeps tokens evenly and what knows the answer."""
