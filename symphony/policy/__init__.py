"""`symphony policy replay`: replay a trace under several tier policies, to find the best policy for a workload."""
