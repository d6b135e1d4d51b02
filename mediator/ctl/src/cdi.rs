//! `mediatorctl tenant cdi`: a file of the Container Device Interface, by which podman and other runtimes give a container a
//! tenant.

use std::path::{Path, PathBuf};

use clap::Args;
use fleet_cdi::{CUDA_LIBRARY, CdiError, CdiFile, Device, Edits, Mount, SOCKETS, Spec};

use api::Tenant;
use cuda_protocol::{DRIVER_VARIABLE, SOCKET_VARIABLE, TENANT_VARIABLE};

use super::client::{self, Client, ClientError};
use super::{Form, json};

/// Folder of the library that is `libcuda.so.1` for a program, where the package installs it.
pub(super) const LIBRARY: &str = "/usr/lib/gpu-mediator/cuda";
/// Place of NVIDIA's library in a container, if it is given one.
const DRIVER: &str = "/usr/lib/gpu-mediator/driver/libcuda.so.1";

#[derive(Clone, Debug, Args)]
pub(super) struct Cdi {
    /// Name of the tenant
    name: String,
    /// Writes the file for runtimes instead of printing it
    #[arg(long, conflicts_with = "remove")]
    write: bool,
    /// Removes the file; the tenant may be gone
    #[arg(long)]
    remove: bool,
    /// The folder that runtimes read
    #[arg(long, value_name = "DIR", default_value = fleet_cdi::FOLDER)]
    folder: PathBuf,
    /// Folder with the library `libcuda.so.1` of gpu-mediator
    #[arg(long, value_name = "DIR", default_value = LIBRARY)]
    library: PathBuf,
    /// NVIDIA's library on the host; not needed with NVIDIA's own CDI device, which brings it
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
}

fn refused(error: CdiError) -> ClientError {
    match error {
        CdiError::Write { path, source } | CdiError::Remove { path, source } => ClientError::File { path, source },
        error => ClientError::Desired { path: PathBuf::from("CDI"), what: error.to_string() },
    }
}

impl Cdi {
    /// Does it; what it prints.
    pub(super) fn run(self, client: &Client, form: Form) -> Result<String, ClientError> {
        let file = CdiFile::new(&self.folder, &self.name).map_err(refused)?;
        let path = file.path().display().to_string();
        if self.remove {
            file.remove().map_err(refused)?;
            return Ok(form.of(&serde_json::json!({ "removed": path }), |_| format!("{path} is removed\n")));
        }
        let tenant: Tenant = client.get(&format!("/v1/tenants/{}", client::segment(&self.name)))?;
        let device = self.device(&tenant.name, &tenant.socket);
        if self.write {
            file.write(vec![device]).map_err(refused)?;
            let name = fleet_cdi::qualified(&tenant.name);
            return Ok(form.of(&serde_json::json!({ "written": path, "device": name }), |_| {
                format!("{path} is written\npodman run --device {name} ...\n")
            }));
        }
        let kind = format!("{}/{}", fleet_cdi::VENDOR, fleet_cdi::CLASS);
        let version = fleet_cdi::VERSION.to_owned();
        Ok(json(&Spec { cdi_version: version, kind, annotations: Default::default(), devices: vec![device] }))
    }

    /// The device of a tenant: its socket alone, the library, and NVIDIA's if it is given.
    fn device(&self, tenant: &str, socket: &Path) -> Device {
        let place = Path::new(SOCKETS).join("cuda").join(format!("{tenant}.cuda"));
        let mut edits = Edits {
            env: vec![
                format!("{SOCKET_VARIABLE}={}", place.display()),
                format!("{TENANT_VARIABLE}={tenant}"),
                format!("LD_LIBRARY_PATH={CUDA_LIBRARY}"),
            ],
            mounts: vec![Mount::read_only(socket, &place), Mount::read_only(&self.library, Path::new(CUDA_LIBRARY))],
        };
        if let Some(driver) = &self.driver {
            edits.mounts.push(Mount::read_only(driver, Path::new(DRIVER)));
            edits.env.push(format!("{DRIVER_VARIABLE}={DRIVER}"));
        }
        Device { name: tenant.to_owned(), container_edits: edits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_gets_one_socket_the_library_and_the_driver() {
        let folder = tempfile::tempdir().unwrap();
        let cdi = Cdi {
            name: "a".to_owned(),
            write: false,
            remove: true,
            folder: folder.path().to_owned(),
            library: "/opt/front".into(),
            driver: Some("/opt/libcuda.so.1".into()),
        };
        let device = cdi.device("a", Path::new("/run/gpu-mediator/a.cuda"));
        let mounts: Vec<_> =
            device.container_edits.mounts.iter().map(|mount| mount.host_path.display().to_string()).collect();
        // Not the folder with the sockets of others.
        assert_eq!(mounts, ["/run/gpu-mediator/a.cuda", "/opt/front", "/opt/libcuda.so.1"]);
        assert!(
            device.container_edits.env.contains(&"GPU_MEDIATOR_CUDA_SOCKET=/run/gpu-mediator/cuda/a.cuda".to_owned())
        );
        assert!(device.container_edits.env.contains(&format!("GPU_MEDIATOR_CUDA_DRIVER={DRIVER}")));
        // What is not there is removed as well.
        let client = Client::new("/nonexistent".into()).unwrap();
        assert!(cdi.run(&client, Form::Table).unwrap().contains("is removed"));
    }
}
