"""What people run: thin command lines over small libraries, one folder a job."""
