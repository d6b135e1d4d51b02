//! `mediatorctl tenant cdi`: writes a CDI (Container Device Interface) file, through which podman and other runtimes
//! make a tenant available to a container.
//!
//! A container mounts the folder of the tenant's socket. With a bind mount of the socket alone, programs in the
//! container could not connect to the card's next owner after a daemon restart.

use std::path::{Path, PathBuf};

use cdi_spec::{CdiError, CdiFile, Cuda, Device, Spec};
use clap::Args;

use api::{Tenant, TenantList, VmList};

use super::client::{self, Client, ClientError};
use super::{Form, json};

/// Directory where the package installs the library that programs load as `libcuda.so.1`.
pub(super) const LIBRARY: &str = "/usr/lib/gpu-mediator/cuda";
/// Names under which programs load the driver and NVML. In the directory, all of them refer to the library.
pub(super) const NAMES: [&str; 4] = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"];

#[derive(Clone, Debug, Args)]
pub(super) struct Cdi {
    /// Name of the tenant
    name: String,
    /// Writes the CDI file instead of printing it
    #[arg(long, conflicts_with = "remove")]
    write: bool,
    /// Removes the CDI file; the tenant need not exist
    #[arg(long)]
    remove: bool,
    /// Folder that container runtimes search for CDI files
    #[arg(long, value_name = "DIR", default_value = cdi_spec::FOLDER)]
    folder: PathBuf,
    /// Folder with gpu-mediator's `libcuda.so.1`
    #[arg(long, value_name = "DIR", default_value = LIBRARY)]
    library: PathBuf,
    /// Path of NVIDIA's libcuda on the host; unnecessary with NVIDIA's own CDI device, which includes it
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
}

fn wrong(what: String) -> ClientError {
    ClientError::Desired { path: PathBuf::from("CDI"), what }
}

fn refused(error: CdiError) -> ClientError {
    match error {
        CdiError::Write { path, source } | CdiError::Remove { path, source } => ClientError::File { path, source },
        error => wrong(error.to_string()),
    }
}

/// Checks that the folder of a tenant's sockets contains nothing else, because the container sees the whole folder.
/// `others` are the sockets of other tenants, VMs, and the daemon.
fn is_alone(tenant: &str, own: &[PathBuf], others: impl IntoIterator<Item = PathBuf>) -> Result<(), String> {
    let Some(path) = own.first() else { return Ok(()) };
    let is_own = |other: &Path| own.iter().any(|path| other == path || other == path.with_extension("new"));
    let socket = path.display();
    let remedy = format!(
        "omit `socket` in the tenant's configuration, or set it to a path in a separate folder, such as \
         /run/gpu-mediator/tenants/{tenant}/cuda.sock"
    );
    let folder = path.parent().filter(|folder| folder.parent().is_some());
    let Some(folder) = folder else { return Err(format!("the socket {socket} is not in a folder; {remedy}")) };
    let shared = |other: &Path| {
        let other = other.display();
        format!("the folder of {socket} also contains {other}, which the container would see; {remedy}")
    };
    if let Some(other) = others.into_iter().find(|other| !is_own(other) && other.starts_with(folder)) {
        return Err(shared(&other));
    }
    // Read the folder on this host. If this user may not read it, rely on the daemon's list.
    let mut there = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let other = there.find(|other| !is_own(other));
    other.map_or(Ok(()), |other| Err(shared(&other)))
}

impl Cdi {
    /// Runs the command and returns its output.
    pub(super) fn run(self, client: &Client, form: Form) -> Result<String, ClientError> {
        let file = CdiFile::new(&self.folder, &self.name).map_err(refused)?;
        let path = file.path().display().to_string();
        if self.remove {
            file.remove().map_err(refused)?;
            return Ok(form.render(&serde_json::json!({ "removed": path }), |_| format!("{path} removed\n")));
        }
        let tenant: Tenant = client.get(&format!("/v1/tenants/{}", client::segment(&self.name)))?;
        let tenants = client.get::<TenantList>("/v1/tenants")?.tenants;
        let others = tenants
            .into_iter()
            .filter(|other| other.name != tenant.name)
            .flat_map(|other| other.all_sockets().to_vec());
        let vms = client.get::<VmList>("/v1/vms")?.vms.into_iter().filter_map(|vm| vm.socket);
        let others = others.chain(vms).chain([client.socket().to_owned()]);
        is_alone(&tenant.name, tenant.all_sockets(), others).map_err(wrong)?;
        let mps = tenant.group_state.as_ref().and_then(|state| state.mps_pipes.as_deref());
        let device = self.device(&tenant.name, tenant.all_sockets(), mps)?;
        if self.write {
            file.write(vec![device]).map_err(refused)?;
            let name = cdi_spec::qualified(&tenant.name);
            return Ok(form.render(&serde_json::json!({ "written": path, "device": name }), |_| {
                format!("{path} written\npodman run --device {name} ...\n")
            }));
        }
        let kind = format!("{}/{}", cdi_spec::VENDOR, cdi_spec::CLASS);
        let version = cdi_spec::VERSION.to_owned();
        Ok(json(&Spec { cdi_version: version, kind, annotations: Default::default(), devices: vec![device] }))
    }

    /// Returns the tenant's device: the folder of its sockets, the library, NVIDIA's library if given, and the MPS
    /// server of the tenant's share group.
    fn device(&self, tenant: &str, sockets: &[PathBuf], mps: Option<&Path>) -> Result<Device, ClientError> {
        let driver = self.driver.as_deref();
        let socket = sockets.first().map_or(Path::new(""), PathBuf::as_path);
        let cuda = Cuda { tenant, socket, sockets, library: &self.library, driver, place: tenant, mps };
        let edits = cuda.edits().map_err(refused)?;
        Ok(Device { name: tenant.to_owned(), container_edits: edits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cdi(folder: &Path) -> Cdi {
        Cdi {
            name: "a".to_owned(),
            write: false,
            remove: true,
            folder: folder.to_owned(),
            library: "/opt/front".into(),
            driver: Some("/opt/libcuda.so.1".into()),
        }
    }

    #[test]
    fn container_gets_socket_folder_library_and_driver() {
        let folder = tempfile::tempdir().unwrap();
        let cdi = cdi(folder.path());
        let device = cdi.device("a", &["/run/gpu-mediator/tenants/a/cuda.sock".into()], None).unwrap();
        let mounts: Vec<_> =
            device.container_edits.mounts.iter().map(|mount| mount.host_path.display().to_string()).collect();
        // The folder is mounted because it outlives the socket of a single owner.
        assert_eq!(mounts[0], "/run/gpu-mediator/tenants/a");
        assert!(
            mounts.contains(&"/opt/front".to_owned()) && mounts.contains(&"/opt/libcuda.so.1".to_owned()),
            "{mounts:?}"
        );
        let socket = "GPU_MEDIATOR_CUDA_SOCKET=/run/gpu-mediator/cuda/a/cuda.sock".to_owned();
        assert!(device.container_edits.env.contains(&socket), "{:?}", device.container_edits.env);
        // Removing a missing file succeeds too.
        let client = Client::new("/nonexistent".into()).unwrap();
        assert!(cdi.run(&client, Form::Table).unwrap().contains("removed"));
    }

    #[test]
    fn a_folder_with_other_sockets_is_given_to_no_container() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("a");
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("cuda.sock"), "").unwrap();
        let alone = own.join("cuda.sock");
        assert_eq!(
            is_alone(
                "a",
                std::slice::from_ref(&alone),
                [folder.path().join("admin.sock"), folder.path().join("b/cuda.sock")]
            ),
            Ok(())
        );
        // Either the daemon reports another socket in the folder, or this host's folder contains another file.
        for other in ["b.sock", "deep/b.sock"] {
            let error = is_alone("a", std::slice::from_ref(&alone), [own.join(other)]).unwrap_err();
            assert!(error.contains(other) && error.contains("tenants/a/cuda.sock"), "{error}");
        }
        std::fs::write(own.join("more"), "").unwrap();
        assert!(is_alone("a", std::slice::from_ref(&alone), []).unwrap_err().contains("more"));
        // The folder may contain all sockets of a tenant with several cards.
        assert_eq!(is_alone("a", &[alone, own.join("more")], []), Ok(()));
        for bad in ["/cuda.sock", "cuda.sock"] {
            assert!(is_alone("a", &[bad.into()], []).unwrap_err().contains("not in a folder"), "{bad}");
        }
    }
}
