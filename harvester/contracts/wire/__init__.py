"""What crosses HTTP between agent, scheduler, gateway and RL job."""
