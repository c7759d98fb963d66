"""What each checkpoint format says about its layers. Configs route; they hold no arithmetic."""
