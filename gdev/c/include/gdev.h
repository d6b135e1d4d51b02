/* Gdev's interface, generated from the crate gdev-c by `cargo run -p gdev-c --example gdev_header`. */

#ifndef GDEV_H
#define GDEV_H

#include <stdint.h>
#include <time.h>

// A context: the number that [`gopen`] returned.
typedef uint64_t Ghandle;

// Description of a kernel in raw code for `sm_20`.
struct gdev_kernel {
  // Name of the kernel.
  const char *name;
  // Offset of its first instruction in the code, in bytes.
  uint32_t entry_offset;
  // Size of its code in bytes.
  uint32_t size;
  // Registers of a thread.
  uint32_t registers;
  // Static shared memory of a block in bytes.
  uint32_t shared_bytes;
  // Local memory of a thread in bytes.
  uint32_t local_bytes;
  // Barriers of a block.
  uint32_t barriers;
  // Size of the parameters in bytes.
  uint32_t params;
};

// Number of blocks, and of threads of a block, in x, y and z.
struct gdev_grid {
  // Number of blocks.
  uint32_t blocks[3];
  // Number of threads of a block.
  uint32_t threads[3];
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens device `minor` and creates a context: a device of CUDA if there is one, otherwise a render node of nouveau.
// The environment variable `GDEV_TARGET` names another device, as for [`gdev_open`]. Returns 0 on an error.
Ghandle gopen(int minor);

// Opens the device with a name: `cuda`, `cuda:NUMBER`, `nouveau`, `nouveau:/dev/dri/renderD128` or `vgpu:/SOCKET`.
// Returns 0 on an error.
Ghandle gdev_open(const char *target);

// Waits for all work and closes a context; its memory is freed.
int gclose(Ghandle handle);

// Returns the message of the calling thread's last error; valid until its next error.
const char *gerror(void);

// Queries a value of the device: 1, the alignment of card memory in bytes; 2, 1 if it has segments, otherwise 0.
int gquery(Ghandle handle,
           uint32_t query,
           uint64_t *result);

// Sets a limit of copies: 1, the size of the pieces in bytes; 2 and 3, the maximum size of a direct write and read in
// bytes; 4, whether CPU and copy engine work at the same time (0 or 1).
int gtune(Ghandle handle,
          uint32_t setting,
          uint32_t value);

// Loads kernels: for a device of CUDA, PTX or a cubin; for other devices, a cubin or assembly for `sm_20`. `module`
// receives the module's number.
int gload(Ghandle handle,
          const void *image,
          uint64_t size,
          uint32_t *module);

// Loads raw code for `sm_20`: 64-bit instructions, with descriptions of its `count` kernels.
int gload_raw(Ghandle handle,
              const void *code,
              uint64_t size,
              const struct gdev_kernel *kernels,
              uint32_t count,
              uint32_t *module);

// Launches a kernel of a module without waiting; `params` has the parameters as the kernel declares them. `id`
// receives the number for [`gsync`]. The kernel may use all memory of the handle.
int glaunch(Ghandle handle,
            uint32_t module,
            const char *kernel,
            const struct gdev_grid *grid,
            const void *params,
            uint64_t params_size,
            uint64_t *id);

// Waits for the work with a number, and all earlier work; with a `timeout` at most that long, and then returns
// `-ETIMEDOUT`.
int gsync(Ghandle handle,
          uint64_t id,
          const struct timespec *timeout);

// Waits for all work of a handle.
int gbarrier(Ghandle handle);

// Allocates card memory of `size` bytes; returns its address for the GPU, or 0.
uint64_t gmalloc(Ghandle handle, uint64_t size);

// Frees card memory from [`gmalloc`]; returns its size in bytes, or 0 on an error.
uint64_t gfree(Ghandle handle, uint64_t address);

// Allocates pinned memory of `size` bytes; returns its address in this process, or NULL.
void *gmalloc_dma(Ghandle handle, uint64_t size);

// Frees pinned memory from [`gmalloc_dma`]; returns its size in bytes, or 0 on an error.
uint64_t gfree_dma(Ghandle handle, void *buffer);

// Copies `size` bytes of this process to the card, after all earlier work, and waits.
int gmemcpy_to_device(Ghandle handle, uint64_t to, const void *from, uint64_t size);

// Copies `size` bytes from the card to this process, after all earlier work, and waits.
int gmemcpy_from_device(Ghandle handle, void *to, uint64_t from, uint64_t size);

// Copies `size` bytes of pinned memory to the card without waiting; `id` receives the number for `gsync`.
int gmemcpy_to_device_async(Ghandle handle,
                            uint64_t to,
                            const void *from,
                            uint64_t size,
                            uint64_t *id);

// Copies `size` bytes from the card to pinned memory without waiting; `id` receives the number for `gsync`.
int gmemcpy_from_device_async(Ghandle handle,
                              void *to,
                              uint64_t from,
                              uint64_t size,
                              uint64_t *id);

// Copies `write_size` bytes of pinned memory to the card, and `read_size` bytes from the card to pinned memory, after
// all earlier work, and waits. Both copies are executed at the same time if the card has two copy engines.
int gmemcpy_both(Ghandle handle,
                 uint64_t to,
                 const void *from,
                 uint64_t write_size,
                 void *read_to,
                 uint64_t read_from,
                 uint64_t read_size);

// Copies `size` bytes on the card, and waits.
int gmemcpy(Ghandle handle, uint64_t to, uint64_t from, uint64_t size);

// Copies `size` bytes on the card without waiting; `id` receives the number for `gsync`.
int gmemcpy_async(Ghandle handle, uint64_t to, uint64_t from, uint64_t size, uint64_t *id);

// Finds the segment of a key, or creates it if `flags` has `IPC_CREAT`; the lower nine bits of `flags` are its rights.
// Returns its number, or a negative error.
int gshmget(Ghandle handle,
            int key,
            uint64_t size,
            int flags);

// Maps a segment, read-only if `flags` has `SHM_RDONLY`. Returns its address for the GPU, or 0; the address is chosen
// by the driver, so that `address` must be 0.
uint64_t gshmat(Ghandle handle,
                int id,
                uint64_t address,
                int flags);

// Waits for all work and unmaps a segment.
int gshmdt(Ghandle handle, uint64_t address);

// Controls a segment: with `IPC_RMID` it loses its key, and is freed when nothing has it attached; with `IPC_STAT`
// `buffer` receives the number of contexts that have it attached, a `uint64_t`.
int gshmctl(Ghandle handle,
            int id,
            int command,
            void *buffer);

// Maps memory of `master`, from [`crate::gmalloc`], into `slave`. Returns its address there, or 0. The memory lives
// until both have freed it.
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
