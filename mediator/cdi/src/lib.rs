//! Container Device Interface: files through which container runtimes add a tenant of a CUDA card, or a vGPU, to a
//! container.
//!
//! Runtimes (containerd, CRI-O, podman) read the files in `/etc/cdi` and `/var/run/cdi`. Each file contains devices of
//! one kind, and each device lists the environment variables and mounts that it adds to a container. The fields follow
//! the specification (cncf-tags/container-device-interface, SPEC.md, version 0.5.0).
//!
//! The crate does not create tenants or vGPUs, and does not depend on orchestrators.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Version of the specification; the first one with all features that this crate uses.
pub const VERSION: &str = "0.5.0";
/// Vendor of the devices. Vendor and class form the kind of a CDI device.
pub const VENDOR: &str = "gpu-mediator.internal";
/// Class of the devices.
pub const CLASS: &str = "share";
/// Folder in which container runtimes look for CDI files. Its contents do not survive a reboot.
pub const FOLDER: &str = "/var/run/cdi";

/// Folder of the CUDA library in a container.
const CUDA_LIBRARY: &str = "/usr/lib/gpu-mediator/cuda";
/// Folder of the socket folders in a container.
pub const SOCKETS: &str = "/run/gpu-mediator";
/// Folder of the MPS server folders in a container.
const MPS: &str = "/run/gpu-mediator/mps";
/// NVIDIA's environment variable for the folder of an MPS server's pipes.
pub const MPS_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Environment variable for the path of a vGPU's socket.
pub const VGPU_VARIABLE: &str = "GPU_MEDIATOR_VFIO_USER_SOCKET";
/// Maximum size of a file to read, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum length of device and file identifiers, in bytes.
const MAX_NAME: usize = 128;

/// A CDI file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Version of the specification.
    pub cdi_version: String,
    /// Vendor and class of the devices.
    pub kind: String,
    /// Annotations, which runtimes forward.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    pub devices: Vec<Device>,
}

/// A device, named within its kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Edits to a container that uses the device.
    pub container_edits: Edits,
}

/// Edits to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Edits {
    /// Environment variables, each as `NAME=VALUE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Mounts of host files and folders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A host file or folder that is mounted in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Path on the host.
    pub host_path: PathBuf,
    /// Path in the container.
    pub container_path: PathBuf,
    /// Mount options.
    pub options: Vec<String>,
}

impl Mount {
    /// Creates a mount whose files have the same permissions as on the host.
    #[must_use]
    pub fn writable(host_path: &Path, container_path: &Path) -> Self {
        let options = ["rw", "nosuid", "nodev", "rbind"].map(str::to_owned).into();
        Self { host_path: host_path.to_owned(), container_path: container_path.to_owned(), options }
    }

    /// Creates a read-only mount. Sockets in it still accept connections.
    #[must_use]
    pub fn read_only(host_path: &Path, container_path: &Path) -> Self {
        let options = ["ro", "nosuid", "nodev", "rbind"].map(str::to_owned).into();
        Self { host_path: host_path.to_owned(), container_path: container_path.to_owned(), options }
    }
}

/// A tenant of a CUDA card, with the properties that a container needs.
#[derive(Clone, Debug)]
pub struct Cuda<'a> {
    /// Name of the tenant.
    pub tenant: &'a str,
    /// The tenant's socket on the host, in its own folder. The container mounts the folder, because a restarted daemon
    /// creates a new socket.
    pub socket: &'a Path,
    /// Sockets of a tenant with several cards, in the order of the cards. All of them are in the folder of `socket`.
    pub sockets: &'a [PathBuf],
    /// Folder of gpu-mediator's library on the host.
    pub library: &'a Path,
    /// NVIDIA's library on the host. If absent, the container obtains this library in another way, such as through
    /// NVIDIA's own CDI files.
    pub driver: Option<&'a Path>,
    /// Path component that separates the tenant's sockets from other sockets in the container.
    pub place: &'a str,
    /// Pipe folder of the MPS server for the tenant's share group, if any. Its parent folder belongs to the server and
    /// survives the server's restarts.
    pub mps: Option<&'a Path>,
}

impl Cuda<'_> {
    /// Returns the edits to a container.
    ///
    /// # Errors
    /// Returns an error if the socket's path has no folder, or if the sockets are in different folders.
    pub fn edits(&self) -> Result<Edits, CdiError> {
        let folder = Path::new(SOCKETS).join("cuda").join(self.place);
        let (mount, first) = socket(self.socket, &folder)?;
        let inside = |path: &PathBuf| match socket(path, &folder)? {
            (other, inside) if other.host_path == mount.host_path => Ok(inside.display().to_string()),
            _ => Err(CdiError::NoFolder(path.clone())),
        };
        let all: Vec<String> = self.sockets.iter().map(inside).collect::<Result<_, _>>()?;
        let list = if all.is_empty() { first.display().to_string() } else { all.join(":") };
        let mut edits = Edits {
            env: vec![
                format!("GPU_MEDIATOR_CUDA_SOCKET={list}"),
                format!("GPU_MEDIATOR_CUDA_TENANT={}", self.tenant),
                format!("LD_LIBRARY_PATH={CUDA_LIBRARY}"),
            ],
            mounts: vec![mount, Mount::read_only(self.library, Path::new(CUDA_LIBRARY))],
        };
        if let Some(driver) = self.driver {
            let place = Path::new("/usr/lib/gpu-mediator/driver/libcuda.so.1");
            edits.mounts.push(Mount::read_only(driver, place));
            edits.env.push(format!("GPU_MEDIATOR_CUDA_DRIVER={}", place.display()));
        }
        if let Some((folder, name)) = self.mps.and_then(|pipes| pipes.parent().zip(pipes.file_name())) {
            let place = Path::new(MPS).join(self.place);
            edits.env.push(format!("{MPS_VARIABLE}={}", place.join(name).display()));
            edits.mounts.push(Mount::writable(folder, &place));
        }
        Ok(edits)
    }
}

/// A vGPU, with the properties that a container running a VMM needs.
#[derive(Clone, Debug)]
pub struct Vgpu<'a> {
    /// The vGPU's socket on the host, in its own folder.
    pub socket: &'a Path,
    /// Path component that separates the socket from other sockets in the container.
    pub place: &'a str,
}

impl Vgpu<'_> {
    /// Returns the folder of a socket in a container.
    #[must_use]
    pub fn folder(place: &str) -> PathBuf {
        Path::new(SOCKETS).join("vgpu").join(place)
    }

    /// Returns the edits to a container.
    ///
    /// # Errors
    /// Returns an error if the socket's path has no folder.
    pub fn edits(&self) -> Result<Edits, CdiError> {
        let (mount, socket) = socket(self.socket, &Self::folder(self.place))?;
        Ok(Edits { env: vec![format!("{VGPU_VARIABLE}={}", socket.display())], mounts: vec![mount] })
    }
}

/// Returns the mount of a socket's folder and the socket's path in the container.
fn socket(socket: &Path, folder: &Path) -> Result<(Mount, PathBuf), CdiError> {
    let parts = socket.parent().filter(|parent| parent.parent().is_some()).zip(socket.file_name());
    let (parent, name) = parts.ok_or_else(|| CdiError::NoFolder(socket.to_owned()))?;
    Ok((Mount::read_only(parent, folder), folder.join(name)))
}

/// Reason why an operation on a CDI file failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum CdiError {
    #[error(
        "{0:?} is not a device name, expected up to {MAX_NAME} of the characters A-Z a-z 0-9 _ . : - with a letter or a digit \
         at both ends"
    )]
    Name(String),
    #[error("socket {} is not in a separate folder, expected a path such as /run/gpu-mediator/claims/a/cuda.sock", .0.display())]
    NoFolder(PathBuf),
    #[error("{} cannot be written", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} cannot be removed", path.display())]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Returns the qualified name of a device, as a container engine passes it to a runtime.
#[must_use]
pub fn qualified(device: &str) -> String {
    format!("{VENDOR}/{CLASS}={device}")
}

/// CDI file of one owner, such as a claim, in a folder that runtimes search.
#[derive(Clone, Debug)]
pub struct CdiFile {
    path: PathBuf,
}

impl CdiFile {
    /// Returns the CDI file of `owner` in `folder`. The file need not exist yet.
    ///
    /// # Errors
    /// Returns an error if `owner` is not a valid file name.
    pub fn new(folder: &Path, owner: &str) -> Result<Self, CdiError> {
        check(owner)?;
        Ok(Self { path: folder.join(format!("{VENDOR}-{CLASS}_{owner}.json")) })
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file with these devices. Readers see either the complete old file or the complete new file.
    ///
    /// # Errors
    /// Returns an error if a device name is invalid, or if the write fails.
    pub fn write(&self, devices: Vec<Device>) -> Result<(), CdiError> {
        devices.iter().try_for_each(|device| check(&device.name))?;
        let kind = format!("{VENDOR}/{CLASS}");
        let spec = Spec { cdi_version: VERSION.to_owned(), kind, annotations: BTreeMap::new(), devices };
        let failed = |source| CdiError::Write { path: self.path.clone(), source };
        let mut text = serde_json::to_vec_pretty(&spec).map_err(|error| failed(error.into()))?;
        text.push(b'\n');
        replace(&self.path, &text, 0o644).map_err(failed)
    }

    /// Returns the file's contents, or `None` if the file does not exist or is not a valid CDI file.
    #[must_use]
    pub fn read(&self) -> Option<Spec> {
        let mut text = Vec::new();
        File::open(&self.path).ok()?.take(MAX_FILE).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Removes the file if it exists, and the temporary file of a killed writer.
    ///
    /// # Errors
    /// Returns an error if a file exists but cannot be removed.
    pub fn remove(&self) -> Result<(), CdiError> {
        for path in [beside(&self.path), self.path.clone()] {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(CdiError::Remove { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Checks that `name` is valid for a device or for the owner of a file.
fn check(name: &str) -> Result<(), CdiError> {
    let ends = [name.bytes().next(), name.bytes().last()];
    let ends = ends.into_iter().all(|byte| byte.is_some_and(|byte| byte.is_ascii_alphanumeric()));
    let all = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte));
    if ends && all && name.len() <= MAX_NAME {
        return Ok(());
    }
    Err(CdiError::Name(name.chars().take(MAX_NAME).collect()))
}

/// Returns the path of the temporary file that will replace a file. Runtimes read only files whose names end in .json
/// or .yaml.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

/// Replaces a file atomically: after a crash, either the old or the new file exists. Does not follow symbolic links at
/// the paths of the file and the temporary file.
///
/// # Errors
/// Returns an error if a file or folder cannot be written.
pub fn replace(path: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let beside = beside(path);
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Always create a new file. Never write to a file that another process has created in the meantime. Other users can
    // read the file only once it is complete.
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(text)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cuda(driver: Option<&Path>) -> Edits {
        let (socket, library) = (Path::new("/run/gpu-mediator/claims/u-0/cuda.sock"), Path::new("/opt/front"));
        Cuda { tenant: "k8s-u-0", socket, sockets: &[], library, driver, place: "gpu", mps: None }.edits().unwrap()
    }

    #[test]
    fn tenant_with_several_cards_has_all_sockets() {
        let sockets = ["/run/gpu-mediator/tenants/a/y.sock", "/run/gpu-mediator/tenants/a/x.sock"].map(PathBuf::from);
        let edits = |sockets: &[PathBuf]| {
            let (socket, library) = (sockets[0].as_path(), Path::new("/opt/front"));
            Cuda { tenant: "a", socket, sockets, library, driver: None, place: "a", mps: None }.edits()
        };
        let found = edits(&sockets).unwrap();
        let list = "/run/gpu-mediator/cuda/a/y.sock:/run/gpu-mediator/cuda/a/x.sock";
        assert_eq!(found.env[0], format!("GPU_MEDIATOR_CUDA_SOCKET={list}"));
        let elsewhere = [sockets[0].clone(), PathBuf::from("/run/other/x.sock")];
        assert!(matches!(edits(&elsewhere), Err(CdiError::NoFolder(path)) if path == elsewhere[1]));
    }

    #[test]
    fn a_tenant_is_its_socket_and_the_library() {
        let edits = cuda(None);
        assert_eq!(
            edits.env,
            [
                "GPU_MEDIATOR_CUDA_SOCKET=/run/gpu-mediator/cuda/gpu/cuda.sock",
                "GPU_MEDIATOR_CUDA_TENANT=k8s-u-0",
                "LD_LIBRARY_PATH=/usr/lib/gpu-mediator/cuda"
            ]
        );
        // Mount the folder instead of the socket in it, because a restarted daemon creates a new socket.
        assert_eq!(edits.mounts[0].host_path, Path::new("/run/gpu-mediator/claims/u-0"));
        assert!(edits.mounts.iter().all(|mount| mount.options.contains(&"ro".to_owned())));
        let with_driver = cuda(Some(Path::new("/lib/libcuda.so.1")));
        assert!(
            with_driver.env.contains(&"GPU_MEDIATOR_CUDA_DRIVER=/usr/lib/gpu-mediator/driver/libcuda.so.1".to_owned())
        );
        assert_eq!(with_driver.mounts.len(), 3);
    }

    #[test]
    fn a_vgpu_is_its_socket() {
        let edits = Vgpu { socket: Path::new("/run/a/b/vgpu.sock"), place: "gpu-0" }.edits().unwrap();
        assert_eq!(edits.env, ["GPU_MEDIATOR_VFIO_USER_SOCKET=/run/gpu-mediator/vgpu/gpu-0/vgpu.sock"]);
        // Mounting the folder of all sockets, or the root folder, would give a container access to other tenants'
        // sockets.
        for bad in ["vgpu.sock", "/vgpu.sock", "/"] {
            let error = Vgpu { socket: Path::new(bad), place: "gpu" }.edits().unwrap_err();
            assert!(error.to_string().contains("not in a separate folder"), "{error}");
        }
    }

    #[test]
    fn a_file_is_written_read_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let file = CdiFile::new(folder.path(), "u-1").unwrap();
        assert!(file.path().ends_with("gpu-mediator.internal-share_u-1.json"));
        file.write(vec![Device { name: "u-1-0".to_owned(), container_edits: cuda(None) }]).unwrap();
        let text = fs::read_to_string(file.path()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["cdiVersion"], "0.5.0");
        assert_eq!(value["kind"], "gpu-mediator.internal/share");
        assert_eq!(value["devices"][0]["containerEdits"]["mounts"][1]["containerPath"], CUDA_LIBRARY);
        assert_eq!(file.read().unwrap().devices[0].name, "u-1-0");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the folder contains only the file");
        file.remove().unwrap();
        file.remove().unwrap();
        assert_eq!(file.read(), None);
        assert_eq!(qualified("u-1-0"), "gpu-mediator.internal/share=u-1-0");
    }

    #[test]
    fn leftover_file_of_killed_writer_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let file = CdiFile::new(folder.path(), "u-1").unwrap();
        fs::write(beside(file.path()), "half").unwrap();
        file.remove().unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_in_the_place_of_a_file_are_replaced_and_not_followed() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let victim = other.path().join("victim");
        fs::write(&victim, "theirs").unwrap();
        let file = CdiFile::new(folder.path(), "u-1").unwrap();
        symlink(&victim, beside(file.path())).unwrap();
        symlink(&victim, file.path()).unwrap();
        file.write(vec![Device { name: "u-1-0".to_owned(), container_edits: cuda(None) }]).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "theirs");
        let there = fs::symlink_metadata(file.path()).unwrap();
        assert!(there.is_file());
        // Runtimes of other users read the file, so this process's umask must not affect the file's mode.
        assert_eq!(there.mode() & 0o777, 0o644);
        // Files whose names differ only after a dot have different temporary files.
        assert_ne!(beside(Path::new("/x/web.1")), beside(Path::new("/x/web.2")));
    }

    #[test]
    fn names_lead_nowhere_else() {
        for bad in ["", "../a", "a/b", "-a", "a-", "a b", "a\n", &"a".repeat(129)] {
            assert!(matches!(CdiFile::new(Path::new("/x"), bad), Err(CdiError::Name(_))), "{bad:?}");
            let folder = tempfile::tempdir().unwrap();
            let device = Device { name: bad.to_owned(), container_edits: Edits::default() };
            assert!(CdiFile::new(folder.path(), "u").unwrap().write(vec![device]).is_err(), "{bad:?}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{bad:?}");
        }
    }

    #[test]
    fn member_of_a_share_group_gets_the_folder_of_its_server() {
        let (socket, library) = (Path::new("/run/gpu-mediator/tenants/a/cuda.sock"), Path::new("/opt/front"));
        let mps = Some(Path::new("/run/gpu-mediator/gpu.mps/decoders/pipes"));
        let edits =
            Cuda { tenant: "a", socket, sockets: &[], library, driver: None, place: "gpu", mps }.edits().unwrap();
        let variable = "CUDA_MPS_PIPE_DIRECTORY=/run/gpu-mediator/mps/gpu/pipes".to_owned();
        assert!(edits.env.contains(&variable), "{:?}", edits.env);
        let mount = edits.mounts.last().unwrap();
        // Mount the parent folder, because each new server recreates the pipe folder.
        assert_eq!(mount.host_path, Path::new("/run/gpu-mediator/gpu.mps/decoders"));
        assert_eq!(mount.container_path, Path::new("/run/gpu-mediator/mps/gpu"));
    }
}
