{{- define "attnd.labels" -}}
app.kubernetes.io/name: attnd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "attnd.daemon" -}}
{{ include "attnd.labels" . }}
app.kubernetes.io/component: daemon
{{- end -}}
{{- define "attnd.controller" -}}
{{ include "attnd.labels" . }}
app.kubernetes.io/component: controller
{{- end -}}
{{- define "attnd.registry" -}}
k8s://{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end -}}
