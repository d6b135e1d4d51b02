/*
 * A program for the CUDA driver API, in the part that Gdev has: adds a number to words, with copies that wait and
 * copies that do not, and checks every word. It declares the functions itself, with the names that cuda.h gives them.
 *
 * usage: driver IMAGE [KEY]
 * IMAGE has the kernel `add` of add.sm20 or add.ptx; with KEY, two contexts also share a segment.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *device, int number);
int cuDeviceGetName(char *name, int size, int device);
int cuDeviceTotalMem_v2(size_t *bytes, int device);
int cuCtxCreate_v2(handle *context, unsigned flags, int device);
int cuCtxDestroy_v2(handle context);
int cuCtxSetCurrent(handle context);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(uint64_t *address, size_t size);
int cuMemFree_v2(uint64_t address);
int cuMemHostAlloc(void **address, size_t size, unsigned flags);
int cuMemFreeHost(void *address);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size);
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size);
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, handle stream);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, handle stream);
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size);
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count);
int cuModuleLoadData(handle *module, const void *image);
int cuModuleGetFunction(handle *function, handle module, const char *name);
int cuModuleUnload(handle module);
int cuLaunchKernel(handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
		   unsigned block_z, unsigned shared, handle stream, void **parameters, void **extra);
int cuStreamCreate(handle *stream, unsigned flags);
int cuStreamSynchronize(handle stream);
int cuStreamDestroy_v2(handle stream);
int cuEventCreate(handle *event, unsigned flags);
int cuEventRecord(handle event, handle stream);
int cuEventSynchronize(handle event);
int cuEventElapsedTime(float *milliseconds, handle start, handle end);
int cuEventDestroy_v2(handle event);
/* Gdev's own functions: only libcuda.so.1 of gdev has them. */
int cuShmGet(int *id, int key, size_t size, int flags) __attribute__((weak));
int cuShmAt(uint64_t *address, int id, int flags) __attribute__((weak));
int cuShmDt(uint64_t address) __attribute__((weak));
int cuShmCtl(int id, int command, void *buffer) __attribute__((weak));

enum { WORDS = 100000, BLOCK = 64, CREATE = 01000, REMOVE = 0 };

static void check(int result, const char *call)
{
	if (result == 0)
		return;
	fprintf(stderr, "%s returned %d\n", call, result);
	exit(1);
}
#define CHECK(call) check(call, #call)

static void expect(const uint64_t *words, uint64_t start)
{
	for (uint64_t i = 0; i < WORDS; i++)
		if (words[i] != i + start) {
			fprintf(stderr, "word %lu is %lu, not %lu\n", i, words[i], i + start);
			exit(1);
		}
}

/* Two contexts use one segment; the second one adds to the words of the first. */
static void share(const char *image, int key)
{
	handle contexts[2], module, function;
	uint64_t addresses[2], count = WORDS, number = 9;
	uint64_t *words = calloc(WORDS, sizeof(*words));
	int ids[2];

	for (int i = 0; i < 2; i++) {
		CHECK(cuCtxCreate_v2(&contexts[i], 0, 0));
		CHECK(cuShmGet(&ids[i], key, WORDS * sizeof(*words), i ? 0600 : CREATE | 0600));
		CHECK(cuShmAt(&addresses[i], ids[i], 0));
	}
	CHECK(cuCtxSetCurrent(contexts[0]));
	for (uint64_t i = 0; i < WORDS; i++)
		words[i] = i;
	CHECK(cuMemcpyHtoD_v2(addresses[0], words, WORDS * sizeof(*words)));
	CHECK(cuCtxSynchronize());
	CHECK(cuCtxSetCurrent(contexts[1]));
	CHECK(cuModuleLoadData(&module, image));
	CHECK(cuModuleGetFunction(&function, module, "add"));
	void *parameters[] = { &addresses[1], &count, &number };
	CHECK(cuLaunchKernel(function, (WORDS + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, NULL, parameters, NULL));
	CHECK(cuCtxSynchronize());
	CHECK(cuShmDt(addresses[1]));
	CHECK(cuCtxSetCurrent(contexts[0]));
	CHECK(cuMemcpyDtoH_v2(words, addresses[0], WORDS * sizeof(*words)));
	expect(words, 9);
	CHECK(cuShmDt(addresses[0]));
	CHECK(cuShmCtl(ids[0], REMOVE, NULL));
	CHECK(cuCtxDestroy_v2(contexts[0]));
	CHECK(cuCtxDestroy_v2(contexts[1]));
	free(words);
}

int main(int argc, char **argv)
{
	size_t size = WORDS * sizeof(uint64_t), total;
	uint64_t memory, other, *words = malloc(size), *pinned;
	handle context, module, function, stream, start, end;
	int count, device;
	float milliseconds;
	char name[64];

	static char image[1 << 16];
	FILE *file = argc > 1 ? fopen(argv[1], "rb") : NULL;
	if (!file || fread(image, 1, sizeof(image) - 1, file) == 0) {
		fprintf(stderr, "usage: driver IMAGE [KEY]; the image must be readable\n");
		return 2;
	}
	fclose(file);
	CHECK(cuInit(0));
	CHECK(cuDeviceGetCount(&count));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDeviceGetName(name, sizeof(name), device));
	CHECK(cuDeviceTotalMem_v2(&total, device));
	CHECK(cuCtxCreate_v2(&context, 0, device));
	CHECK(cuMemAlloc_v2(&memory, size));
	CHECK(cuMemAlloc_v2(&other, size));
	CHECK(cuMemHostAlloc((void **)&pinned, size, 0));
	CHECK(cuModuleLoadData(&module, image));
	CHECK(cuModuleGetFunction(&function, module, "add"));
	CHECK(cuStreamCreate(&stream, 0));
	CHECK(cuEventCreate(&start, 0));
	CHECK(cuEventCreate(&end, 0));

	/* An array with a pointer to each parameter, in the default stream. */
	uint64_t number = 7, items = WORDS;
	void *parameters[] = { &memory, &items, &number };
	for (uint64_t i = 0; i < WORDS; i++)
		words[i] = i;
	CHECK(cuMemcpyHtoD_v2(memory, words, size));
	CHECK(cuLaunchKernel(function, (WORDS + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, NULL, parameters, NULL));
	CHECK(cuMemcpyDtoH_v2(words, memory, size));
	expect(words, 7);

	/* Copies that do not wait, in a stream, and events. */
	uint64_t other_number = 5;
	void *other_parameters[] = { &other, &items, &other_number };
	memcpy(pinned, words, size);
	CHECK(cuEventRecord(start, stream));
	CHECK(cuMemcpyHtoDAsync_v2(other, pinned, size, stream));
	CHECK(cuLaunchKernel(function, (WORDS + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, stream, other_parameters,
			     NULL));
	CHECK(cuMemcpyDtoHAsync_v2(pinned, other, size, stream));
	CHECK(cuEventRecord(end, stream));
	CHECK(cuStreamSynchronize(stream));
	CHECK(cuEventSynchronize(end));
	CHECK(cuEventElapsedTime(&milliseconds, start, end));
	expect(pinned, 12);
	if (milliseconds <= 0)
		check(-1, "the time between two events");

	/* A fill, and a copy on the card. */
	CHECK(cuMemsetD8_v2(memory, 0x5a, size));
	CHECK(cuMemcpyDtoD_v2(memory, other, size / 2));
	CHECK(cuMemcpyDtoH_v2(words, memory, size));
	if (memcmp(words, pinned, size / 2) || words[WORDS - 1] != 0x5a5a5a5a5a5a5a5a)
		check(-1, "a copy on the card");

	CHECK(cuEventDestroy_v2(start));
	CHECK(cuEventDestroy_v2(end));
	CHECK(cuStreamDestroy_v2(stream));
	CHECK(cuModuleUnload(module));
	CHECK(cuMemFree_v2(memory));
	CHECK(cuMemFree_v2(other));
	CHECK(cuMemFreeHost(pinned));
	CHECK(cuCtxDestroy_v2(context));
	if (argc > 2)
		share(image, atoi(argv[2]));
	printf("verified %d words\n", WORDS);
	return 0;
}
