"""What monitors tell, and what acting on them does: testbeds with known answers, beside what needs no monitor."""
