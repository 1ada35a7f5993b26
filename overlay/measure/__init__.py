"""What training costs, by formula."""
