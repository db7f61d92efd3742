"""Data-parallel replicas: gradient averages, buffer broadcasts, synchronized BatchNorm."""
