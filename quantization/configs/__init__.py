"""What each checkpoint format says about its layers. Configs choose schemes and hold no arithmetic."""
