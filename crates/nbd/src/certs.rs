//! Certificates from files, under the names QEMU and nbdkit use, so that one directory
//! serves them all.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_fault::Fault;

/// Certificate chain of the server, leaf first.
pub const SERVER_CERT: &str = "server-cert.pem";
/// Private key of the server.
pub const SERVER_KEY: &str = "server-key.pem";
/// Authorities whose client certificates are accepted.
pub const CA_CERT: &str = "ca-cert.pem";
/// Revoked client certificates; optional.
pub const CA_CRL: &str = "ca-crl.pem";

/// Why a directory of certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum CertError {
    /// A file is missing, unreadable, or not PEM.
    File {
        /// Which one.
        path: PathBuf,
        /// What is wrong.
        source: rustls::pki_types::pem::Error,
    },
    /// A file holds no certificate.
    Empty {
        /// Which one.
        path: PathBuf,
    },
    /// The authorities cannot be used.
    Authority {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not go together, or are of an unknown kind.
    Pair {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
}

impl CertError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            CertError::File { path, source } => Fault::new(
                format!("cannot read {}: {source}", path.display()),
                "it must be a PEM file readable by this user",
            ),
            CertError::Empty { path } => Fault::new(
                format!("{} holds no certificate", path.display()),
                "put the PEM certificate there",
            ),
            CertError::Authority { path, reason } => Fault::new(
                format!(
                    "{} cannot be used to check client certificates: {reason}",
                    path.display()
                ),
                "put the certificates of the authorities there, as PEM",
            ),
            CertError::Pair { cert, key, source } => Fault::new(
                format!(
                    "{} and {} cannot be used together: {source}",
                    cert.display(),
                    key.display()
                ),
                "put a certificate there and the key it was made with",
            ),
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertError> {
    let file = |source| CertError::File {
        path: path.to_owned(),
        source,
    };
    let list: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(file)?
        .collect::<Result<_, _>>()
        .map_err(file)?;
    if list.is_empty() {
        return Err(CertError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(list)
}

/// Makes a TLS configuration from the files in `dir` (TLS 1.2 and 1.3, X.509 only). With
/// `verify_clients`, a client must show a certificate signed by an authority in `ca-cert.pem`
/// and not listed in `ca-crl.pem`, if there is one.
pub fn load(dir: &Path, verify_clients: bool) -> Result<Arc<ServerConfig>, CertError> {
    let (cert, key) = (dir.join(SERVER_CERT), dir.join(SERVER_KEY));
    let chain = certificates(&cert)?;
    let secret = PrivateKeyDer::from_pem_file(&key).map_err(|source| CertError::File {
        path: key.clone(),
        source,
    })?;
    let secret = crate::keys::put_right(secret);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let pair = |source| CertError::Pair {
        cert: cert.clone(),
        key: key.clone(),
        source,
    };
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(pair)?;
    let builder = if verify_clients {
        let path = dir.join(CA_CERT);
        let authority = |reason: String| CertError::Authority {
            path: path.clone(),
            reason,
        };
        let mut roots = RootCertStore::empty();
        for ca in certificates(&path)? {
            roots.add(ca).map_err(|e| authority(e.to_string()))?;
        }
        let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let crl = dir.join(CA_CRL);
        if crl.exists() {
            let file = |source| CertError::File {
                path: crl.clone(),
                source,
            };
            let lists: Vec<CertificateRevocationListDer<'static>> =
                CertificateRevocationListDer::pem_file_iter(&crl)
                    .map_err(file)?
                    .collect::<Result<_, _>>()
                    .map_err(file)?;
            // A list speaks only for its own authority; others in the chain may have none.
            verifier = verifier.with_crls(lists).allow_unknown_revocation_status();
        }
        builder.with_client_cert_verifier(verifier.build().map_err(|e| authority(e.to_string()))?)
    } else {
        builder.with_no_client_auth()
    };
    builder
        .with_single_cert(chain, secret)
        .map(Arc::new)
        .map_err(pair)
}
