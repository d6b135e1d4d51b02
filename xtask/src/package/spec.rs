//! Package specifications: names, descriptions, programs and configuration files.

/// A build output, with its path in the package.
pub(super) struct Built {
    /// Name in the build output folder.
    pub name: &'static str,
    pub path: &'static str,
    pub mode: u32,
    /// True if the package cannot be built without this file.
    pub is_required: bool,
}

/// Describes an executable program.
const fn program(name: &'static str, path: &'static str, is_required: bool) -> Built {
    Built { name, path, mode: 0o755, is_required }
}

/// Describes a shared library, which is not executable.
const fn library(name: &'static str, path: &'static str, is_required: bool) -> Built {
    Built { name, path, mode: 0o644, is_required }
}

/// A package.
pub(super) struct Spec {
    pub name: &'static str,
    pub summary: &'static str,
    /// Lines of the description.
    pub description: &'static [&'static str],
    pub built: &'static [Built],
    /// Configuration files. An upgrade keeps the administrator's changes to these files.
    pub conffiles: &'static [&'static str],
    /// True if the package's scripts set up a user and a service.
    pub has_service: bool,
    /// Dependencies other than libraries, as names of Debian packages.
    pub depends: &'static str,
    /// Files that the package must contain, with their permissions in the format of `ls -l`.
    pub expected: &'static [(&'static str, &'static str)],
}

/// Additional names of the CUDA library, each a symbolic link in the same folder. Programs open the library under any
/// of these names, in any order, but a process must load it only once.
pub(super) const LINKS: [(&str, &str); 3] = [
    ("usr/lib/gpu-mediator/cuda/libcuda.so", "libcuda.so.1"),
    ("usr/lib/gpu-mediator/cuda/libnvidia-ml.so.1", "libcuda.so.1"),
    ("usr/lib/gpu-mediator/cuda/libnvidia-ml.so", "libcuda.so.1"),
];

/// Additional names of the CUDA library in guests.
pub(super) const GUEST_LINKS: [(&str, &str); 3] = [
    ("usr/lib/gpu-mediator-guest/libcuda.so", "libcuda.so.1"),
    ("usr/lib/gpu-mediator-guest/libnvidia-ml.so.1", "libcuda.so.1"),
    ("usr/lib/gpu-mediator-guest/libnvidia-ml.so", "libcuda.so.1"),
];
/// File that adds the CUDA libraries in guests to the loader's search path.
pub(super) const LOADER_FILE: &str = "etc/ld.so.conf.d/gpu-mediator-guest.conf";
/// Folder of the CUDA libraries in guests, which is also the contents of [`LOADER_FILE`].
pub(super) const GUEST_FOLDER: &str = "/usr/lib/gpu-mediator-guest";

/// Path of the libvirt hook.
pub(super) const LIBVIRT_HOOK: &str = "etc/libvirt/hooks/qemu.d/gpu-mediator";
/// Path of the addition to libvirt's AppArmor profile.
pub(super) const LIBVIRT_APPARMOR: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/gpu-mediator";
/// Path of the Proxmox hook script.
pub(super) const PROXMOX_HOOK: &str = "usr/share/gpu-mediator/proxmox/gpu-mediator-hook";

/// Package of the daemon and its tool.
pub(super) const DAEMON: Spec = Spec {
    name: "gpu-mediator",
    summary: "shares NVIDIA cards between virtual machines",
    description: &[
        "One daemon, mediatord, owns the NVIDIA cards of a KVM host and gives each",
        "virtual machine a virtual GPU that the stock nouveau driver drives without",
        "modification. mediatorctl shows and changes what each may have.",
    ],
    built: &[
        program("mediatord", "usr/bin/mediatord", true),
        program("mediatorctl", "usr/bin/mediatorctl", true),
        program("cuda-owner", "usr/lib/gpu-mediator/cuda-owner", false),
        program("cuda-worker", "usr/lib/gpu-mediator/cuda-worker", false),
        library("libcuda.so", "usr/lib/gpu-mediator/cuda/libcuda.so.1", false),
        program("gpu-mediator-slurm", "usr/bin/gpu-mediator-slurm", false),
        library("libspank_gpu_mediator.so", "usr/lib/gpu-mediator/slurm/spank_gpu_mediator.so", false),
    ],
    conffiles: &["etc/gpu-mediator.toml", LIBVIRT_HOOK, LIBVIRT_APPARMOR],
    has_service: true,
    depends: "adduser",
    expected: &[
        (LIBVIRT_APPARMOR, "-rw-r--r--"),
        ("etc/gpu-mediator.toml", "-rw-r--r--"),
        (LIBVIRT_HOOK, "-rwxr-xr-x"),
        ("usr/bin/mediatorctl", "-rwxr-xr-x"),
        ("usr/bin/mediatord", "-rwxr-xr-x"),
        ("usr/lib/systemd/system/gpu-mediator.service", "-rw-r--r--"),
        ("usr/share/bash-completion/completions/mediatorctl", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/changelog.gz", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/copyright", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/examples/cuda.conf", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/examples/page.conf", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/examples/plugstack.conf", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/reference/api.json", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator/reference/configuration.md", "-rw-r--r--"),
        ("usr/share/fish/vendor_completions.d/mediatorctl.fish", "-rw-r--r--"),
        (PROXMOX_HOOK, "-rwxr-xr-x"),
        ("usr/share/man/man1/mediatorctl.1.gz", "-rw-r--r--"),
        ("usr/share/man/man5/gpu-mediator.toml.5.gz", "-rw-r--r--"),
        ("usr/share/man/man8/mediatord.8.gz", "-rw-r--r--"),
        ("usr/share/zsh/vendor-completions/_mediatorctl", "-rw-r--r--"),
    ],
};

/// Package of the Kubernetes driver.
pub(super) const KUBERNETES: Spec = Spec {
    name: "gpu-mediator-kubernetes",
    summary: "gives pods shares of the cards of gpu-mediator",
    description: &[
        "A driver for dynamic resource allocation, which asks the mediatord of a node",
        "for a part of a card for each claim of a pod; a hook that adds virtual GPUs",
        "to virtual machines of KubeVirt; the manifests of both, and a Helm chart.",
    ],
    built: &[
        program("gpu-mediator-dra", "usr/bin/gpu-mediator-dra", true),
        program("gpu-mediator-kubevirt", "usr/bin/gpu-mediator-kubevirt", true),
    ],
    conffiles: &[],
    has_service: false,
    depends: "",
    expected: &[
        ("usr/bin/gpu-mediator-dra", "-rwxr-xr-x"),
        ("usr/bin/gpu-mediator-kubevirt", "-rwxr-xr-x"),
        ("usr/share/doc/gpu-mediator-kubernetes/changelog.gz", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-kubernetes/copyright", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-kubernetes/examples/Containerfile", "-rw-r--r--"),
        ("usr/share/gpu-mediator/helm/gpu-mediator/Chart.yaml", "-rw-r--r--"),
        ("usr/share/gpu-mediator/kubernetes/daemonset.yaml", "-rw-r--r--"),
        ("usr/share/gpu-mediator/kubernetes/example/pods.yaml", "-rw-r--r--"),
        ("usr/share/gpu-mediator/kubernetes/share-parameters.schema.json", "-rw-r--r--"),
    ],
};

/// Package of the libraries for virtual machines with CUDA programs.
pub(super) const GUEST: Spec = Spec {
    name: "gpu-mediator-guest",
    summary: "lets programs of a virtual machine use CUDA on the host's card",
    description: &[
        "The libraries libcuda and libnvidia-ml for virtual machines of gpu-mediator.",
        "NVIDIA's CUDA runtime and the libraries above it run on them unmodified; the",
        "calls are executed on the host. gpu-mediator-guest-doctor finds what is",
        "missing in a virtual machine.",
    ],
    built: &[
        library("libcuda_guest.so", "usr/lib/gpu-mediator-guest/libcuda.so.1", true),
        program("gpu-mediator-guest-doctor", "usr/bin/gpu-mediator-guest-doctor", true),
    ],
    conffiles: &[LOADER_FILE],
    has_service: false,
    depends: "",
    expected: &[
        (LOADER_FILE, "-rw-r--r--"),
        ("usr/bin/gpu-mediator-guest-doctor", "-rwxr-xr-x"),
        ("usr/lib/gpu-mediator-guest/libcuda.so.1", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-guest/changelog.gz", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-guest/copyright", "-rw-r--r--"),
    ],
};

/// Package of Gdev's interface, for programs in guests and on the host.
pub(super) const GDEV: Spec = Spec {
    name: "gpu-mediator-gdev",
    summary: "library for programs that compute on a card of gpu-mediator",
    description: &[
        "Gdev's interface as a C library, for virtual machines with nouveau, for CUDA",
        "cards, and for the host's own programs with a virtual GPU; the part of CUDA's",
        "driver interface that Gdev has; and gdev-crypt, an encrypted block device",
        "(NBD) whose sectors a card encrypts.",
    ],
    built: &[
        library("libgdev.so", "usr/lib/gpu-mediator/gdev/libgdev.so", true),
        library("libgdev_cuda.so", "usr/lib/gpu-mediator/gdev/libcuda.so.1", true),
        program("gdev-crypt", "usr/bin/gdev-crypt", true),
    ],
    conffiles: &[],
    has_service: false,
    depends: "",
    expected: &[
        ("usr/bin/gdev-crypt", "-rwxr-xr-x"),
        ("usr/include/gdev.h", "-rw-r--r--"),
        ("usr/lib/gpu-mediator/gdev/libcuda.so.1", "-rw-r--r--"),
        ("usr/lib/gpu-mediator/gdev/libgdev.so", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-gdev/changelog.gz", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-gdev/copyright", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-gdev/examples/add.c", "-rw-r--r--"),
        ("usr/share/doc/gpu-mediator-gdev/gdev.md", "-rw-r--r--"),
        ("usr/share/man/man1/gdev-crypt.1.gz", "-rw-r--r--"),
        ("usr/share/pkgconfig/gdev.pc", "-rw-r--r--"),
    ],
};
