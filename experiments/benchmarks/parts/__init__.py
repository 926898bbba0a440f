"""Parts that several benchmarks share: clocks, problems, jobs for a device."""
