//! What a client's certificate calls it.

use crate::der::{EXPLICIT_0, OID, SEQUENCE, Values};

/// `2.5.4.3`, the common name (X.520).
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// Longest name used, bytes.
const NAME_MAX: usize = 64;

/// The common name of the subject of an X.509 certificate (RFC 5280, 4.1), if it has one.
pub(crate) fn common_name(certificate: &[u8]) -> Option<String> {
    let mut fields = Values(Values(certificate).expect(SEQUENCE)?);
    let mut body = Values(fields.expect(SEQUENCE)?);
    // The version is there if it is not the first.
    let mut after_version = body;
    if let Some((EXPLICIT_0, ..)) = after_version.next() {
        body = after_version;
    }
    // Serial number, signature algorithm, issuer, validity.
    for _ in 0..4 {
        body.next()?;
    }
    let mut names = Values(body.expect(SEQUENCE)?);
    let mut found = None;
    // Each round takes at least two bytes of the name.
    while let Some((_, set, _)) = names.next() {
        let mut pair = Values(Values(set).expect(SEQUENCE)?);
        if pair.expect(OID)? == COMMON_NAME {
            // The last one is the most specific.
            found = pair.next().map(|v| v.1);
        }
    }
    let text = String::from_utf8_lossy(found?);
    let mut name: String = text.chars().filter(|c| !c.is_control()).collect();
    while name.len() > NAME_MAX {
        name.pop();
    }
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_name_is_found() {
        for (given, want) in [
            (Some("host7"), Some("host7")),
            (Some("a\nb"), Some("ab")),
            (None, None),
        ] {
            let mut params = rcgen::CertificateParams::new(vec!["x".to_owned()]).unwrap();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params
                .distinguished_name
                .push(rcgen::DnType::OrganizationName, "some");
            if let Some(name) = given {
                params
                    .distinguished_name
                    .push(rcgen::DnType::CommonName, name);
            }
            let key = rcgen::KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            let der = certificate.der();
            assert_eq!(common_name(der).as_deref(), want);
            for cut in 0..der.len() {
                let _ = common_name(&der[..cut]);
            }
        }
    }
}
