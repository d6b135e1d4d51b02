/* Gdev's interface, generated from the crate gdev-c by `cargo run -p gdev-c --example gdev_header`. */

#ifndef GDEV_H
#define GDEV_H

#include <stdint.h>
#include <time.h>

// [`gshmget`] flag: the key belongs to the sharing group to which the operator assigned this virtual machine.
#define GDEV_SHM_GROUP 65536

// Handle of a context, returned by [`gopen`].
typedef uint64_t Ghandle;

// Description of a kernel in raw `sm_20` code.
struct gdev_kernel {
  // Name of the kernel, NUL-terminated.
  const char *name;
  // Offset of the entry point in the code, in bytes.
  uint32_t entry_offset;
  // Size of the kernel's code in bytes.
  uint32_t size;
  // Number of registers per thread.
  uint32_t registers;
  // Static shared memory per block in bytes.
  uint32_t shared_bytes;
  // Local memory per thread in bytes.
  uint32_t local_bytes;
  // Number of barriers per block.
  uint32_t barriers;
  // Size of the parameters in bytes.
  uint32_t params;
};

// Grid and block dimensions in x, y and z.
struct gdev_grid {
  // Grid dimensions in blocks.
  uint32_t blocks[3];
  // Block dimensions in threads.
  uint32_t threads[3];
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens device `minor` and creates a context. Uses a CUDA device if one exists, or a nouveau render node otherwise.
// The environment variable `GDEV_TARGET` overrides the device, with the same names as [`gdev_open`]. Returns 0 on
// error.
Ghandle gopen(int minor);

// Opens a device by name: `cuda`, `cuda:NUMBER`, `nouveau`, `nouveau:/dev/dri/renderD128` or `vgpu:/SOCKET`. Returns 0
// on error.
Ghandle gdev_open(const char *target);

// Waits for all work, closes a context, and frees its memory.
int gclose(Ghandle handle);

// Returns the message of the calling thread's last error. It is valid until the thread's next error.
const char *gerror(void);

// Queries a device property. Query 1 returns the alignment of card memory in bytes. Query 2 returns 1 if the device
// supports segments, and 0 otherwise.
int gquery(Ghandle handle,
           uint32_t query,
           uint64_t *result);

// Sets a copy parameter. Setting 1 is the chunk size in bytes. Settings 2 and 3 are the maximum sizes of direct writes
// and reads in bytes. Setting 4 is 1 if the CPU and the copy engine work concurrently, and 0 otherwise.
int gtune(Ghandle handle,
          uint32_t setting,
          uint32_t value);

// Loads a module. A CUDA device accepts PTX or a cubin. Other devices accept an `sm_20` cubin or `sm_20` assembly.
// Stores the module number in `module`.
int gload(Ghandle handle,
          const void *image,
          uint64_t size,
          uint32_t *module);

// Loads raw `sm_20` code (64-bit instructions) with the descriptions of `count` kernels.
int gload_raw(Ghandle handle,
              const void *code,
              uint64_t size,
              const struct gdev_kernel *kernels,
              uint32_t count,
              uint32_t *module);

// Launches a kernel of a module without waiting. `params` contains the parameters in the kernel's layout. Stores the
// number for [`gsync`] in `id`. The kernel may access all memory of the handle.
int glaunch(Ghandle handle,
            uint32_t module,
            const char *kernel,
            const struct gdev_grid *grid,
            const void *params,
            uint64_t params_size,
            uint64_t *id);

// Waits for the work with number `id`, and for all earlier work. If `timeout` is not NULL, waits at most that long,
// and returns `-ETIMEDOUT` when the timeout expires.
int gsync(Ghandle handle,
          uint64_t id,
          const struct timespec *timeout);

// Waits for all work of a handle.
int gbarrier(Ghandle handle);

// Allocates `size` bytes of card memory. Returns the GPU virtual address, or 0 on error.
uint64_t gmalloc(Ghandle handle, uint64_t size);

// Frees card memory allocated by [`gmalloc`]. Returns its size in bytes, or 0 on error.
uint64_t gfree(Ghandle handle, uint64_t address);

// Allocates `size` bytes of pinned memory. Returns its address in this process, or NULL on error.
void *gmalloc_dma(Ghandle handle, uint64_t size);

// Frees pinned memory allocated by [`gmalloc_dma`]. Returns its size in bytes, or 0 on error.
uint64_t gfree_dma(Ghandle handle, void *buffer);

// Copies `size` bytes from this process to the card, after all earlier work, and waits.
int gmemcpy_to_device(Ghandle handle, uint64_t to, const void *from, uint64_t size);

// Copies `size` bytes from the card to this process, after all earlier work, and waits.
int gmemcpy_from_device(Ghandle handle, void *to, uint64_t from, uint64_t size);

// Copies `size` bytes of pinned memory to the card without waiting. Stores the number for `gsync` in `id`.
int gmemcpy_to_device_async(Ghandle handle,
                            uint64_t to,
                            const void *from,
                            uint64_t size,
                            uint64_t *id);

// Copies `size` bytes from the card to pinned memory without waiting. Stores the number for `gsync` in `id`.
int gmemcpy_from_device_async(Ghandle handle,
                              void *to,
                              uint64_t from,
                              uint64_t size,
                              uint64_t *id);

// Copies `write_size` bytes of pinned memory to the card, and `read_size` bytes from the card to pinned memory, after
// all earlier work, and waits. The copies run concurrently if the card has two copy engines.
int gmemcpy_both(Ghandle handle,
                 uint64_t to,
                 const void *from,
                 uint64_t write_size,
                 void *read_to,
                 uint64_t read_from,
                 uint64_t read_size);

// Copies `size` bytes within card memory, and waits.
int gmemcpy(Ghandle handle, uint64_t to, uint64_t from, uint64_t size);

// Copies `size` bytes within card memory without waiting. Stores the number for `gsync` in `id`.
int gmemcpy_async(Ghandle handle, uint64_t to, uint64_t from, uint64_t size, uint64_t *id);

// Finds the segment with a key, or creates it if `flags` contains `IPC_CREAT`. The low nine bits of `flags` are its
// permissions. With [`GDEV_SHM_GROUP`], the group's other machines can find and read the segment. Permission bit 0002
// also grants them write access. Returns the segment's number, or a negative errno value.
int gshmget(Ghandle handle,
            int key,
            uint64_t size,
            int flags);

// Maps a segment, read-only if `flags` contains `SHM_RDONLY`. Returns its GPU virtual address, or 0 on error. The
// driver chooses the address, so `address` must be 0.
uint64_t gshmat(Ghandle handle,
                int id,
                uint64_t address,
                int flags);

// Waits for all work and unmaps a segment.
int gshmdt(Ghandle handle, uint64_t address);

// Controls a segment. `IPC_RMID` removes its key. The segment is freed when the last context detaches it. `IPC_STAT`
// stores the number of attached contexts in `buffer` as a `uint64_t`.
int gshmctl(Ghandle handle,
            int id,
            int command,
            void *buffer);

// Maps memory that `master` has allocated with [`crate::gmalloc`] into `slave`. Returns its GPU virtual address in
// `slave`, or 0 on error. The memory exists until both contexts have freed it.
uint64_t gref(Ghandle master,
              uint64_t address,
              uint64_t size,
              Ghandle slave);

// Frees a reference.
int gunref(Ghandle handle, uint64_t address);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GDEV_H */
