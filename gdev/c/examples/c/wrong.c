/* Calls the library wrongly: wrong TARGET IMAGE. Each call must return an error, and the last ones must work. */

#include "gdev.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>

static int mistakes;

static void refuse(const char *what, int result, int expected)
{
	if (result != -expected) {
		printf("%s: %d instead of %d (%s)\n", what, result, -expected, gerror());
		mistakes++;
	} else if (!gerror()[0]) {
		printf("%s: no message\n", what);
		mistakes++;
	}
}

static void refuse_value(const char *what, uint64_t result)
{
	if (result) {
		printf("%s: accepted\n", what);
		mistakes++;
	}
}

int main(int argc, char **argv)
{
	static char image[1 << 16], data[4096];
	struct gdev_grid grid = { .blocks = { 1, 1, 1 }, .threads = { 1, 1, 1 } }, empty = { 0 };
	struct timespec short_time = { 0, 1 };
	uint64_t id, answer;
	uint32_t module;
	FILE *file = argc > 2 ? fopen(argv[2], "rb") : NULL;
	if (!file)
		return 2;
	size_t size = fread(image, 1, sizeof(image), file);
	fclose(file);

	refuse_value("an unknown kind of device", gdev_open("opencl:0"));
	refuse_value("no name", gdev_open(NULL));
	refuse_value("a device that is not there", gdev_open("cuda:77"));
	refuse_value("a render node that is not there", gdev_open("nouveau:/dev/dri/renderD250"));
	refuse_value("a negative device", gopen(-1));
	refuse_value("the last number of a device", gopen(2147483647));
	refuse("closing no handle", gclose(0), EBADF);
	refuse("a handle never opened", gbarrier(12345), EBADF);

	Ghandle handle = gdev_open(argv[1]), other = gdev_open(argv[1]);
	if (!handle || !other || gload(handle, image, size, &module)) {
		printf("no device: %s\n", gerror());
		return 1;
	}
	uint64_t memory = gmalloc(handle, sizeof(data)), freed = gmalloc(handle, sizeof(data));
	char *pinned = gmalloc_dma(handle, sizeof(data));
	if (!memory || !freed || !pinned || !gfree(handle, freed))
		return 1;
	refuse_value("0 bytes", gmalloc(handle, 0));
	refuse_value("more than any card has", gmalloc(handle, 1ULL << 55));
	refuse_value("memory freed twice", gfree(handle, freed));
	refuse_value("the middle of memory", gfree(handle, memory + 256));
	refuse_value("pinned memory of malloc", gfree_dma(handle, data));
	refuse("memory of another handle", gmemcpy_to_device(other, memory, data, 16), EINVAL);
	refuse("more than the memory has", gmemcpy_to_device(handle, memory, data, sizeof(data) + 1), EINVAL);
	refuse("a range that wraps", gmemcpy_from_device(handle, data, memory + 8, -8ULL), EINVAL);
	refuse("a NULL buffer", gmemcpy_from_device(handle, NULL, memory, 8), EINVAL);
	refuse("memory that was freed", gmemcpy_from_device(handle, data, freed, 8), EINVAL);
	refuse("an asynchronous copy of unpinned memory", gmemcpy_to_device_async(handle, memory, data, 8, &id), EINVAL);
	refuse("two copies of one range", gmemcpy_both(handle, memory, pinned, 16, pinned + 8, memory + 64, 16), EINVAL);
	refuse("ranges that overlap", gmemcpy(handle, memory, memory + 8, 16), EINVAL);
	refuse("an unknown kernel", glaunch(handle, module, "none", &grid, NULL, 0, &id), ENOENT);
	refuse("parameters of another size", glaunch(handle, module, "add", &grid, data, 8, &id), EINVAL);
	refuse("a grid without threads", glaunch(handle, module, "add", &empty, data, 24, &id), EINVAL);
	refuse("no grid", glaunch(handle, module, "add", NULL, data, 24, &id), EINVAL);
	refuse("a module of another handle", glaunch(other, 0, "add", &grid, data, 24, &id), EINVAL);
	refuse("an image of nothing", gload(other, "\x01\x02", 2, &module), EINVAL);
	refuse("work that was not submitted", gsync(handle, 1000000, &short_time), EINVAL);
	refuse("an unknown query", gquery(handle, 99, &answer), EINVAL);
	refuse("an unknown setting", gtune(handle, 99, 1), EINVAL);
	refuse("pieces of one byte", gtune(handle, 1, 1), EINVAL);
	refuse("a segment that was not found", gshmctl(handle, 5, IPC_RMID, NULL), EINVAL);
	refuse("detaching memory", gshmdt(handle, memory), EINVAL);
	refuse_value("a reference beyond the memory", gref(handle, memory, sizeof(data) + 1, other));
	refuse("freeing a reference that is none", gunref(handle, memory), EINVAL);
	refuse_value("a segment at an address", gshmat(handle, 1, memory, 0));

	/* All of it left the handle as it was. A reference of another handle outlives its owner. */
	memset(pinned, 0x5a, sizeof(data));
	if (gmemcpy_to_device_async(handle, memory, pinned, sizeof(data), &id) || gsync(handle, id, NULL))
		mistakes++;
	/* Both directions at once: the first half is written while the second half is read. */
	memset(pinned, 0x6b, sizeof(data) / 2);
	if (gmemcpy_both(handle, memory, pinned, sizeof(data) / 2, pinned + sizeof(data) / 2, memory + sizeof(data) / 2,
			 sizeof(data) / 2) ||
	    pinned[sizeof(data) - 1] != 0x5a)
		mistakes++;
	uint64_t there = gref(handle, memory, sizeof(data), other);
	if (!there || !gfree(handle, memory) || gfree_dma(handle, pinned) != sizeof(data) || gclose(handle))
		mistakes++;
	if (gmemcpy_from_device(other, data, there, sizeof(data)) || data[0] != 0x6b || data[4095] != 0x5a)
		mistakes++;
	if (gunref(other, there) || gclose(other))
		mistakes++;
	refuse("a closed handle", gbarrier(handle), EBADF);
	printf("%d mistakes\n", mistakes);
	return mistakes != 0;
}
