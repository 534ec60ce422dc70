"""HTTP messages between agent, scheduler, gateway and RL job."""
