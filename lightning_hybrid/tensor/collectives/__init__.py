"""What tensor ranks send each other inside of layers, with its gradients."""
