/* Shares a segment between two processes: shared TARGET KEY. */

#include "gdev.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE 262144

static int failed(const char *what)
{
	printf("%s: %s\n", what, gerror());
	return 1;
}

/* Finds the segment, checks its bytes, and is not allowed to be found by a wrong key. */
static int reader(const char *target, int key)
{
	static unsigned char data[SIZE];
	Ghandle handle = gdev_open(target);
	int id = handle ? gshmget(handle, key, SIZE, 0) : -1;
	if (id < 0)
		return failed("the reader's segment");
	if (gshmget(handle, key + 1, SIZE, 0) >= 0)
		return failed("a key that nobody made was found");
	uint64_t at = gshmat(handle, id, 0, SHM_RDONLY);
	if (!at || gmemcpy_from_device(handle, data, at, SIZE))
		return failed("the reader's copy");
	for (int i = 0; i < SIZE; i++)
		if (data[i] != (unsigned char)(i * 7))
			return failed("a byte differs");
	return gshmdt(handle, at) || gclose(handle) ? failed("the reader's end") : 0;
}

int main(int argc, char **argv)
{
	static unsigned char data[SIZE];
	int ready[2], status, key = argc > 2 ? atoi(argv[2]) : 4711;
	uint64_t attached;
	char byte = 0;

	if (argc < 2 || pipe(ready))
		return 2;
	pid_t child = fork();
	if (child == 0)
		return read(ready[0], &byte, 1) == 1 ? reader(argv[1], key) : 1;

	Ghandle handle = gdev_open(argv[1]);
	int id = handle ? gshmget(handle, key, SIZE, IPC_CREAT | 0600) : -1;
	if (id < 0)
		return failed("the segment");
	uint64_t at = gshmat(handle, id, 0, 0);
	for (int i = 0; i < SIZE; i++)
		data[i] = (unsigned char)(i * 7);
	if (!at || gmemcpy_to_device(handle, at, data, SIZE))
		return failed("the writer's copy");
	if (write(ready[1], &byte, 1) != 1 || waitpid(child, &status, 0) != child || status)
		return failed("the reader");
	if (gshmctl(handle, id, IPC_STAT, &attached) || attached != 1)
		return failed("the number of contexts");
	if (gshmdt(handle, at) || !gshmdt(handle, at))
		return failed("detaching once, and not twice");
	if (gmemcpy_from_device(handle, data, at, 8) == 0)
		return failed("detached memory was read");
	if (gshmctl(handle, id, IPC_RMID, NULL) || gshmget(handle, key, SIZE, 0) >= 0)
		return failed("the removed segment");
	printf("shared %d bytes\n", SIZE);
	return gclose(handle) ? 1 : 0;
}
