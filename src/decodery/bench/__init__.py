"""What a decoding method is worth on this machine: workloads, measurements, result files and pages."""
