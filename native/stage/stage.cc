namespace nostall::stage {}
