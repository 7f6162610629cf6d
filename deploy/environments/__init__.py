"""The exact packages of each environment, and what installs them. Only the standard library may be imported here."""
