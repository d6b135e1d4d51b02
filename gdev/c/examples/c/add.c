/* Adds a number to each word of a buffer on any device: add TARGET IMAGE [NUMBER]. */

#include "gdev.h"

#include <stdio.h>
#include <stdlib.h>

#define COUNT 100000

static int failed(const char *what)
{
	fprintf(stderr, "add: %s: %s\n", what, gerror());
	return 1;
}

int main(int argc, char **argv)
{
	static uint64_t words[COUNT];
	static char image[1 << 16];
	uint64_t number = argc > 3 ? strtoull(argv[3], NULL, 0) : 7, id, at;
	uint32_t module;

	FILE *file = argc > 2 ? fopen(argv[2], "rb") : NULL;
	if (!file) {
		fprintf(stderr, "usage: add TARGET IMAGE [NUMBER]; the image must be readable\n");
		return 2;
	}
	size_t size = fread(image, 1, sizeof(image), file);
	fclose(file);

	Ghandle handle = gdev_open(argv[1]);
	if (!handle)
		return failed("no device");
	if (gload(handle, image, size, &module))
		return failed("loading the image");
	uint64_t memory = gmalloc(handle, sizeof(words));
	if (!memory)
		return failed("allocating memory");

	for (at = 0; at < COUNT; at++)
		words[at] = at << 24;
	if (gmemcpy_to_device(handle, memory, words, sizeof(words)))
		return failed("copying to the card");
	struct gdev_grid grid = { .blocks = { (COUNT + 255) / 256, 1, 1 }, .threads = { 256, 1, 1 } };
	uint64_t params[3] = { memory, COUNT, number };
	if (glaunch(handle, module, "add", &grid, params, sizeof(params), &id) || gsync(handle, id, NULL))
		return failed("the kernel");
	if (gmemcpy_from_device(handle, words, memory, sizeof(words)))
		return failed("copying from the card");

	for (at = 0; at < COUNT; at++) {
		if (words[at] != (at << 24) + number) {
			fprintf(stderr, "add: word %lu is %lx\n", (unsigned long)at, (unsigned long)words[at]);
			return 1;
		}
	}
	if (gfree(handle, memory) != sizeof(words) || gfree(handle, memory) != 0)
		return failed("freeing memory");
	if (gclose(handle))
		return failed("closing the device");
	printf("verified %d words\n", COUNT);
	return 0;
}
