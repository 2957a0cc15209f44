// The officer's page has tables to sort and nothing to draw.
  start();
