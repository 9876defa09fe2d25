//! Private keys as other programs write them.
//!
//! The private scalar of an ECDSA key is a string of exactly as many bytes as the curve's order has
//! (RFC 5915, 3). GnuTLS (`certtool`) writes it as it would an integer: with a zero byte in front
//! if its top bit is set, which half of all keys have, and without leading zeros. The library that
//! uses the key takes it to the letter, so such a key is put right before.

use crate::der::{EXPLICIT_0, INTEGER, OCTETS, OID, SEQUENCE, Values, put};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer};

/// Curves and the bytes of their scalars: P-256, P-384, P-521.
const CURVES: [(&[u8], usize); 3] = [
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07], 32),
    (&[0x2b, 0x81, 0x04, 0x00, 0x22], 48),
    (&[0x2b, 0x81, 0x04, 0x00, 0x23], 66),
];
/// An ECDSA key in PKCS #8 says so (RFC 5480, 2.1.1).
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];

/// The same key as it should have been written; any other key as it is.
pub(crate) fn put_right(key: PrivateKeyDer<'static>) -> PrivateKeyDer<'static> {
    match &key {
        PrivateKeyDer::Sec1(sec1) => match mend_sec1(sec1.secret_sec1_der(), None) {
            Some(mended) => PrivateSec1KeyDer::from(mended).into(),
            None => key,
        },
        PrivateKeyDer::Pkcs8(pkcs8) => match mend_pkcs8(pkcs8.secret_pkcs8_der()) {
            Some(mended) => PrivatePkcs8KeyDer::from(mended).into(),
            None => key,
        },
        _ => key,
    }
}

fn scalar_len(curve: &[u8]) -> Option<usize> {
    CURVES.iter().find(|c| c.0 == curve).map(|c| c.1)
}

/// An `ECPrivateKey` (RFC 5915) with its scalar at full length; `None` if there is nothing to mend.
/// `curve` where the key itself does not name it.
fn mend_sec1(der: &[u8], curve: Option<&[u8]>) -> Option<Vec<u8>> {
    let mut fields = Values(Values(der).expect(SEQUENCE)?);
    let version = fields.expect(INTEGER)?;
    let scalar = fields.expect(OCTETS)?;
    let rest = fields.0;
    let named = match fields.next() {
        Some((EXPLICIT_0, parameters, _)) => Values(parameters).expect(OID),
        _ => None,
    };
    let len = scalar_len(named.or(curve)?)?;
    if scalar.len() == len {
        return None;
    }
    let zeros = scalar.iter().take_while(|b| **b == 0).count();
    let digits = scalar.get(zeros..)?;
    let mut full = vec![0; len.checked_sub(digits.len())?];
    full.extend_from_slice(digits);
    let mut body = Vec::new();
    put(&mut body, INTEGER, version);
    put(&mut body, OCTETS, &full);
    body.extend_from_slice(rest);
    let mut out = Vec::new();
    put(&mut out, SEQUENCE, &body);
    Some(out)
}

/// The same inside a `PrivateKeyInfo` (RFC 5208).
fn mend_pkcs8(der: &[u8]) -> Option<Vec<u8>> {
    let mut fields = Values(Values(der).expect(SEQUENCE)?);
    let version = fields.expect(INTEGER)?;
    let (tag, algorithm, whole) = fields.next()?;
    let mut parameters = Values(algorithm);
    if tag != SEQUENCE || parameters.expect(OID)? != EC_PUBLIC_KEY {
        return None;
    }
    let curve = parameters.expect(OID);
    let mended = mend_sec1(fields.expect(OCTETS)?, curve)?;
    let mut body = Vec::new();
    put(&mut body, INTEGER, version);
    body.extend_from_slice(whole);
    put(&mut body, OCTETS, &mended);
    body.extend_from_slice(fields.0);
    let mut out = Vec::new();
    put(&mut out, SEQUENCE, &body);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::crypto::ring::sign::any_supported_type;
    use rustls::pki_types::pem::PemObject;

    /// Made by `certtool --generate-privkey --key-type=ecdsa --curve=secp256r1` for this test; it
    /// protects nothing.
    const GNUTLS: &str = include_str!("../tests/data/gnutls-p256-top-bit.pem");
    /// The same with `--curve=secp384r1`.
    const GNUTLS_384: &str = include_str!("../tests/data/gnutls-p384-top-bit.pem");

    #[test]
    fn keys_as_gnutls_writes_them_are_loaded() {
        for pem in [GNUTLS, GNUTLS_384] {
            let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
            assert!(
                any_supported_type(&key).is_err(),
                "needs no mending: no test"
            );
            let key = put_right(key);
            any_supported_type(&key).unwrap();
            let PrivateKeyDer::Sec1(sec1) = &key else {
                panic!("another form")
            };
            // The same key in PKCS #8, with the scalar as GnuTLS writes it.
            let good = sec1.secret_sec1_der();
            let mut fields = Values(Values(good).expect(SEQUENCE).unwrap());
            let version = fields.expect(INTEGER).unwrap();
            let scalar = fields.expect(OCTETS).unwrap();
            let (_, parameters, _) = Values(fields.0).next().unwrap();
            let mut inner = Vec::new();
            put(&mut inner, INTEGER, version);
            put(&mut inner, OCTETS, &[&[0], scalar].concat());
            inner.extend_from_slice(fields.0);
            let (mut sequence, mut algorithm, mut body) = (Vec::new(), Vec::new(), Vec::new());
            put(&mut sequence, SEQUENCE, &inner);
            put(&mut algorithm, OID, EC_PUBLIC_KEY);
            algorithm.extend_from_slice(parameters);
            put(&mut body, INTEGER, &[0]);
            put(&mut body, SEQUENCE, &algorithm);
            put(&mut body, OCTETS, &sequence);
            let mut pkcs8 = Vec::new();
            put(&mut pkcs8, SEQUENCE, &body);
            let key = put_right(PrivatePkcs8KeyDer::from(pkcs8).into());
            any_supported_type(&key).unwrap();
        }
    }

    #[test]
    fn other_keys_stay_as_they_are() {
        let good = rcgen::KeyPair::generate().unwrap().serialize_der();
        assert_eq!(mend_pkcs8(&good), None);
        for cut in 0..good.len() {
            assert_eq!(mend_pkcs8(&good[..cut]), None);
            assert_eq!(mend_sec1(&good[..cut], None), None);
        }
    }
}
