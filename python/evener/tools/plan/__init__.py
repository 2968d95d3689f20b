"""`evener plan`: what the planner would choose, and the step to expect, before renting anything."""
